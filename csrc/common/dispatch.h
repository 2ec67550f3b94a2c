// Picks a template instance by dtype.
//
// defines: SPARK_DISPATCH_ACTIVATION
#pragma once

#include "device.cuh"
#include "launch.h"

// Runs `...` with `T` bound to the activation type; anything else is an unsupported call.
#define SPARK_DISPATCH_ACTIVATION(dtype, ...) \
    switch (dtype) {                          \
        case spark::DType::bf16: {            \
            using T = spark::bf16;            \
            __VA_ARGS__;                      \
            break;                            \
        }                                     \
        case spark::DType::f16: {             \
            using T = spark::f16;             \
            __VA_ARGS__;                      \
            break;                            \
        }                                     \
        case spark::DType::f32: {             \
            using T = float;                  \
            __VA_ARGS__;                      \
            break;                            \
        }                                     \
        default:                              \
            return spark::kUnsupported;       \
    }
