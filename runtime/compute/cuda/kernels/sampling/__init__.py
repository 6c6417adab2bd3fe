"""Sampling on NVIDIA GPUs: all rows of a batch at once, without a sort.

The rules are those of `sampler.py` in runtime/compute/, which tests hold them to.

In reading order:

- thresholds.py: where top-k, top-p and min-p cut logits off
- draw.py: drawing tokens from what is kept
- argmax.py: the greatest logit of each row and its token, in Triton

May import: triton, torch and the kernels of dense/.
"""
