"""Keep costs of work on a device: files of measured costs, shipped ones, and their measurement."""
