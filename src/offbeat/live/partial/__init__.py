"""A rank's places at the host process: at channels, among shared weights, at the bell."""
