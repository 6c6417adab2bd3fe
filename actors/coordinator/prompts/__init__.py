"""Prompts on their way to token ids: bounded, fair, given up with their request.

Texts wait by length, in a lane each, so that no short one waits behind a long one. Short texts are
tokenised in threads of the coordinator; long ones in processes of a lower priority, which are
killed where a text is given up.

In reading order:

- requests.py: a request as token ids, limits and sampling options
- encoder.py: the lanes, and what may wait in them
- encoding_child.py: the parent's side of a process that tokenises
- encoding_main.py: that process

May import: runtime/ without torch.
"""
