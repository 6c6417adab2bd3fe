"""Tensors only: what a model is, its weights, its cache, its forward and its sampling. Knows no
socket and no message.

`spec`, `layout`, `headers`, `pages`, `batch` and `threads` import no torch, so that whoever plans
may use them.
"""
