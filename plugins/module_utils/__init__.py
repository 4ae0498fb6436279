"""What runs on a target host: parsers and probes, standard library and Python 3.9 only."""
