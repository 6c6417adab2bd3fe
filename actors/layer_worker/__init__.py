"""A layer worker: holds single layers for a block server, its master, often on another machine.

It needs nothing on disk. What it holds is sent to it once, checked against the manifest, and kept
in its cache.

In reading order:

- layer_worker.py: the actor, made from its options: obeys its master, and bare peers
- assigned_layers.py: the layers it is assigned, and their files
- store.py: the files of one manifest in the cache
- store_files.py: the single files of the store

May import: runtime/ and actors/options.py; no other actor's room.
"""
