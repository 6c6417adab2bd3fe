"""Layer workers, as their master keeps them: which are there, what each holds, and what is done
when one is lost.

In reading order:

- lending.py: the workers of a block server, and what each is given
- offer.py: the layers as files with a manifest, put together as read
- layer_setup.py: how a worker gets its layers and says they are loaded
- lending_backend.py: a stage as runs of blocks, some here and some there
- lent_run.py: a run of blocks that a worker holds: one Batch a turn
- lent_worker.py: one worker: its requests, its answers, its times

May import: runtime/, and the backend of actors/block_server/.
"""
