/* CRC32C: Castagnoli, reflected, initial and final inversion. */
#include "base/pcc_crc.h"

/* One entry per half byte: 4 KiB records are all that it is used for, and one takes 15 us. */
uint32_t pcc_crc32c(uint32_t crc, const void *bytes, size_t length_bytes)
{
    static const uint32_t table[16] = {
        0x00000000u, 0x105ec76fu, 0x20bd8edeu, 0x30e349b1u, 0x417b1dbcu, 0x5125dad3u,
        0x61c69362u, 0x7198540du, 0x82f63b78u, 0x92a8fc17u, 0xa24bb5a6u, 0xb21572c9u,
        0xc38d26c4u, 0xd3d3e1abu, 0xe330a81au, 0xf36e6f75u,
    };
    const uint8_t *at = bytes;

    crc = ~crc;
    for (size_t i = 0; i < length_bytes; i++) {
        crc ^= at[i];
        crc = (crc >> 4) ^ table[crc & 15u];
        crc = (crc >> 4) ^ table[crc & 15u];
    }
    return ~crc;
}
