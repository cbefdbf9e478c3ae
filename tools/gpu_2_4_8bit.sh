#!/usr/bin/env bash
# 2:4 and narrow blocks in 8 bits: row by row, right and timed; 16-bit 2:4 before and after the wait; scales inside of the sums
set -u
gpu=$(python -c "import torch; print(torch.cuda.get_device_name().replace(' ', '_'))")
echo "$gpu"; date; cp commit $RESULTS/ 2>/dev/null
timeout 60 python benchmarks/rows_2_4_8bit.py $RESULTS/rows_$gpu.json 45 2>&1 | tee $RESULTS/rows.txt | tail -70 | cut -c1-330
date
for round in 1 2; do
  LD_LIBRARY_PATH=$DATA/before timeout 15 python benchmarks/rows_2_4.py $RESULTS/two_four_before_${round}_$gpu.json > $RESULTS/two_four_before_$round.txt 2>&1
  timeout 15 python benchmarks/rows_2_4.py $RESULTS/two_four_after_${round}_$gpu.json > $RESULTS/two_four_after_$round.txt 2>&1
done
tail -2 $RESULTS/two_four_*.txt | cut -c1-250; date
timeout 75 python -m pytest -q -p no:cacheprovider --maxprocesses=15 -n 15 --tb=short tests/python/test_kernels.py tests/python/test_eight_bits_gpu.py \
  -k "2_4_int8 or 2_4_float8 or narrow_int8 or narrow_float8" --durations=8 > $RESULTS/tests.txt 2>&1
tail -12 $RESULTS/tests.txt; date
timeout 30 python -m pytest -q -p no:cacheprovider --maxprocesses=15 -n 8 --tb=short tests/python/test_eight_bits_2_4.py > $RESULTS/tests_2_4.txt 2>&1
tail -4 $RESULTS/tests_2_4.txt
timeout 40 python benchmarks/bench_eight_bits.py --dtypes float8_scaled --budget 30 --commit $(cat commit 2>/dev/null || echo unknown) --output $RESULTS/scaled_$gpu.json > $RESULTS/scaled.txt 2>&1
tail -3 $RESULTS/scaled.txt | cut -c1-300; date
timeout 30 python -m pytest -q -p no:cacheprovider --maxprocesses=15 -n 15 --tb=short tests/python/test_kernels.py -k "(dds_2_4_bf16 or narrow_bf16) and not grouped" > $RESULTS/tests_16.txt 2>&1
tail -4 $RESULTS/tests_16.txt; date
