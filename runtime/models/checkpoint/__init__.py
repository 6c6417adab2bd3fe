"""A model's weights by their headers alone: which tensors there are, in which file, and what they
take; and, by their bytes, which model it is.

In reading order:

- layout.py: which tensors a checkpoint holds, and their bytes
- formats/: a stored matrix's shapes, bytes and cuts, a file a format
- safetensors.py: what lies where in safetensors files
- index.py: the tensors of a folder, by name
- tensor_digests.py: digests of tensors, each hashed once a machine
- identity.py: what decides a model's numbers, part by part
- split.py: how a shard is split over ranks
- layer_manifest.py: layers as files that travel to a worker
- report.py: whether zrt can run a model: `zrt check`

May import: runtime/models/architecture/, runtime/text/ and the files of runtime/ itself.
"""
