"""Speed of flash_cute beside its peers. `bench/README.md` says how to run and read it."""
