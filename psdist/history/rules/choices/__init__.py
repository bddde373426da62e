"""The rules on psdist's own choices of modes, codecs and local steps."""
