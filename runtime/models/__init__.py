"""Models as files: what a model is, what its checkpoint holds, and how it gets to this machine. No
torch, so that a coordinator may plan with it.

In reading order:

- architecture/: what a decoder is made of, read from config.json
- checkpoint/: what lies where in its weights, and whether it can be run
- fetch/: a model reference as a folder of files

May import: runtime/text/, process/, messages/ and the files of runtime/ itself.
"""
