"""The codecs, a module for each kind: ``quantized``, ``sign``, ``sparse``, ``low_rank``; ``plain``
has casts and unchanged values, ``packed`` compresses the payload of another codec, ``own`` has
codecs of users, and ``raw`` stands for no codec. Imports psdist/codecs/base.py and blocks.py.
"""
