"""The layer cases, written once against the fixture `worlds`. tests/emu and tests/sm90 import and run them."""
