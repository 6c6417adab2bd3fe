"""A cluster file, and what follows from it: which stage holds which blocks, and what memory that
takes.

In reading order:

- file_schema.py: the tables and keys of a cluster file, with defaults
- toml_tables.py: TOML tables as Structs, with every mistake collected
- file_checks.py: mistakes that no value shows by itself
- file_loader.py: reads a cluster file; overrides from the command line
- partition.py: which stage holds which blocks
- seats.py: the block servers of a plan, and how a stage is cut in two
- memory.py: what a cluster asks of memory, against what there is
- gpu_memory.py: what a cluster asks of each GPU of this machine, against what it has
- layer_sharing.py: which blocks a block server and its layer workers compute

May import: runtime/models/, messages/ and the files of runtime/ itself. Pure: no torch, no zmq, no
asyncio.
"""
