"""What ``psdist check`` proves of a recorded run.

``replay`` counts what the servers did, each other module is named after what it judges and adds to
``findings``.

Pure: no file is read here, nothing printed (docs/history.md).
"""
