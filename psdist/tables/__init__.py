"""Embedding tables whose rows live on the servers: what a table is, its rows, their optimizers.

``specs`` describes the tables of a job and which server holds which row, ``payloads`` the messages
that carry rows, ``store`` the rows of one part. Servers and workers use this package, which imports
neither. psdist.workers.tables has the modules of a script, psdist.servers.tables the server's part.
"""
