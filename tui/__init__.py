"""The terminal monitor: what a cluster tells its subscribers, as rows (pure), and the Textual
application that shows them."""
