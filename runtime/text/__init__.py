"""Text and token ids, by a model's own tokenizer. No torch.

In reading order:

- prompts.py: a request's prompt as token ids
- tokenizer.py: text to token ids, and back
- cuts.py: long texts in pieces with the ids of the whole
- least_tokens.py: how many tokens a text has at least
- encoding_limit.py: the context that a prompt must fit, checked on the way
- tokenizer_files.py: the files beside tokenizer.json
- chat_template.py: chats as the model was trained on them
- literal_specials.py: names of special tokens that a user writes, as text
- token_decoders.py: tokens to text, step by step as a tokenizer's decoder does
- detokenizer.py: text in pieces that are never taken back
- tokenizer_parts.py: what a tokenizer is made of, and the characters that stand for bytes
- stop_strings.py: stop strings over a stream of text

May import: runtime/messages/ and the files of runtime/ itself.
"""
