"""Keys, their texts, YAML and messages: what every config is read with, whatever the stage."""
