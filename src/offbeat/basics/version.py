"""The version: this is its only place. The package's metadata is made from it; CHANGELOG.md tells what it brought."""

__version__ = "0.1.0"
