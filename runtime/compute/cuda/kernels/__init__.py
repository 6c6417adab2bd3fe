"""The Triton kernels: only functions on the device, in Triton's language; the launches are in the
room above.

- dense/: rows and products (gemv.py, elementwise.py), and dependent_launch.py, which all kernels
  but
  host_copy.py use.
- attention/: place_heads.py, then paged_decode.py or paged_prompt.py, then combine.py.
- sampling/: argmax.py; thresholds.py and then draw.py.
- host_copy.py: rows copied to memory of the host, and from there.

Imports torch, triton and other kernels, by name (`from … import wait`): a kernel cannot look up an
attribute of a module.
"""
