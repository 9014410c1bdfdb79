"""What `setup.py` needs to compile the library; nothing here is installed."""
