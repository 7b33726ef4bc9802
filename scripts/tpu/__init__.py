"""Reading what XLA made of a program for a TPU: chips, compiled HLO, memory traffic."""
