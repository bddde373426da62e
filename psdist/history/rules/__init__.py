"""The rules of ``psdist check`` on a recorded run; pure: no file is read and nothing printed.

``log`` replays what servers did and judges each server's log. ``values`` compares the values that
workers used and pushed. ``choices`` replays psdist's own choices of modes, codecs and local steps.
``summaries`` compares summary.json. Each module adds to ``findings`` (docs/reference/history.md).
"""
