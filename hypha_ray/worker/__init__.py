"""The inner loop: one worker's training between two outer rounds."""
