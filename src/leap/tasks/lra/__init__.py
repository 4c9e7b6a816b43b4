"""Long Range Arena: sequences of one to eight thousand tokens to be told apart into classes."""
