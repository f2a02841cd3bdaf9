"""Which of several engines a request goes to.  Pure: no clock, no I/O, no tensor."""
