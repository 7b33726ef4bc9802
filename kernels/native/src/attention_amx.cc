#include "attention_kernel.h"
