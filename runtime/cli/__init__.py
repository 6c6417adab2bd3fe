"""The command line: what `zrt` understands, does and says.

main.py reads the words and runs a command; commands/ has one file a command. What several commands
share: argument_types.py (values), cluster_arguments.py (which cluster), sampling_arguments.py
(options of a generation, from messages/sampling.py), question.py and answer.py (one generation),
json_output.py, foreground.py, progress.py (bars and notices), preflight.py (what can be told before
anything starts), detach.py and log_lines.py (`zrt up --detach` and its log).

It may import everything; nothing but a node imports it.
"""
