"""The terminal monitor: what a cluster tells its subscribers, as rows (pure), and the Textual
application that shows them.

In reading order:

- app.py: `zrt top`: views, keys, what they do
- feed.py: snapshots as they come, through lost connections
- state.py: the last snapshot, and what is kept of earlier ones
- tree.py: the cluster as a tree
- tables.py: sessions, events, drains, replies of ranks
- rows.py: rows as lines of text: cells, bars, sparklines
- lines.py: a table drawn line by line
- detail.py: one session in a screen of its own
- plot.py: throughput as a plot of block characters
- plots.py: that plot as a widget
- screens.py: questions, facts, the chat, the list of keys
- keys.py: the views and keys, and their descriptions
- palette.py: what ctrl+p lists
- status.py: `zrt status`: tree and sessions on stdout

May import: runtime/client/, messages/ and the files of runtime/ itself. A client like any other.
"""
