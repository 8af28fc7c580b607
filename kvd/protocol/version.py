"""Protocol version. A different major is refused at the handshake; a different minor is fine."""

PROTO_MAJOR = 1
PROTO_MINOR = 4
