"""Layer workers, as their master keeps them: which are there, what each holds, and what is done
when one is lost.

In reading order:

- lending.py: the workers of a block server, and what each is given
- known_workers.py: which workers are there, and which cannot help
- lending_plan.py: which worker gets which blocks; pure
- offer.py: the layers as files with a manifest, put together as read
- layer_setup.py: how a worker gets its layers and says they are loaded
- lending_backend.py: a stage as runs of blocks, some here and some there
- own_runs.py: the runs of blocks that this process keeps
- lent_run.py: a run of blocks that a worker holds: one Batch a turn
- lent_worker.py: one worker: its requests, its answers, its times

May import: runtime/, and the backend of actors/block_server/.
"""
