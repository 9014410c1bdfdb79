"""Every architecture that the installed Transformers has, by flash_cute and by eager."""
