"""What sequences remember on the device: paged keys and values, recurrent state by slot."""
