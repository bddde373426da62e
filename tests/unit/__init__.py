"""Fast tests, in a folder for each room: the tests of psdist/ROOM/x.py are unit/ROOM/test_x.py."""
