"""The constructors of `flash_cute.Mask`, which are its static methods."""
