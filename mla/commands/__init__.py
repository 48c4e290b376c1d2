"""What the commands of `mla` are made of: flags, objects from words, records, text."""
