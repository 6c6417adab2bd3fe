"""The scripted client: `zrt.runtime.Client`. A connection that breaks is made again, and no token
is lost or repeated.

In reading order:

- client.py: generations, status and control of a running cluster
- connection.py: the connection, made again when it breaks, and its open requests
- stream.py: one generation as its client hears it
- conversation.py: a chat's turns and commands, and what is left out of a full context

May import: runtime/wire/, transport/, process/, messages/ and the files of runtime/ itself; no
actor.
"""
