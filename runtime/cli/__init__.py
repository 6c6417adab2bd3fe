"""The command line: `zrt …`. Answers go to stdout, progress and errors to stderr.

Commands import what they need when they run, so that `zrt status` does not wait for imports that
only `zrt up` needs.

In reading order:

- main.py: the parser, exit status, and where each command goes
- exit_status.py: runs the command; why it failed, and with which status
- commands/: a file each: its words, and what it does
- argument_types.py: words of the command line, read and checked
- cluster_arguments.py: words that name a cluster or its file
- sampling_arguments.py: words of a generation's options, from the one table
- question.py: one generation as the command line words it
- answer.py: an answer as it is printed
- notice.py: what an answer waits for, on stderr, and its figures
- json_output.py: what `--json` prints
- foreground.py: a coroutine, run until it ends or a signal ends it
- preflight.py: what can be told before anything starts: check, plan
- log_lines.py: the lines of a cluster's log
- detach.py: `zrt up --detach`

May import: everything, actors/ too; nothing imports it.
"""
