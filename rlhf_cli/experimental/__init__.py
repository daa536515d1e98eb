"""What has never run where it is meant to run. Imported by the name of a config alone."""
