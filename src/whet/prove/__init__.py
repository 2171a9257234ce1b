"""What a translated config means, held against the other system's own code: `whet convert FILE --prove`."""
