"""The pure heart of the daemon: events in, instructions out.

Nothing here knows asyncio, sockets, torch, zmq or clocks: time comes as an argument, and every
effect leaves as an instruction that the shell (`kvd.daemon`) carries out.
"""
