"""What tests are built from: one module for each noun, imported by every folder of tests."""
