"""What a decoder is made of, read from a model's own files. Every key is read or refused by name.

In reading order:

- config_json.py: `config.json`, read key by key
- families.py: the model families, and how they differ: a row each
- spec.py: ModelSpec: what the decoder is driven by
- layer_patterns.py: which blocks see a window, and which rotate
- rope_spec.py: what the rotary embedding is
- generation_config.py: defaults of sampling, and the ids that end an answer

May import: runtime/text/, messages/ and the files of runtime/ itself. Pure, for the planner's sake.
"""
