"""Several ranks: their shares, their collectives, and the processes they run in."""
