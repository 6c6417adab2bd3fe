"""KV memory: pages owned by sessions, or kept as cache for sessions of an equal prefix.

`free + cached + used = total` holds at every turn.

In reading order:

- page_pool.py: the account of pages; knows no tensor
- session_cache.py: what the caches of CPU and GPU have in common
- slab_cache.py: keys and values in CPU memory, a slab a session
- paged_cache.py: keys and values in GPU memory, in pages

May import: runtime/compute/tensors.py, runtime/models/ and the files of runtime/ itself.
"""
