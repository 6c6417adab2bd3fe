"""Text and token ids, by a model's own tokenizer. No torch.

In reading order:

- tokenizer.py: text to token ids, and back
- tokenizer_files.py: the files beside tokenizer.json
- chat_template.py: chats as the model was trained on them
- literal_specials.py: names of special tokens that a user writes, as text
- token_decoders.py: tokens to text, step by step as a tokenizer's decoder does
- detokenizer.py: text in pieces that are never taken back
- stop_strings.py: stop strings over a stream of text

May import: the files of runtime/ itself.
"""
