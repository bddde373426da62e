"""The protocol over the virtual network: seeded schedules, broken peers, proved histories."""
