"""What work costs on a device: files of measured costs, shipped ones, and how they are measured."""
