"""Interfaces of other projects on flash_cute: each a module of its own, imported only by those who ask for it."""
