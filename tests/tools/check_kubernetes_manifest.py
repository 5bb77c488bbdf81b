"""What `heddle launch --launcher kubernetes` prints, against the published schema of Kubernetes, where that is installed.

    python check_kubernetes_manifest.py HEDDLE
"""

import json
import subprocess
import sys

SKIPPED = 77
VERSIONS = ("1.25", "1.37")

try:
    import kubernetes_validate
except ImportError:
    print("kubernetes-validate is not installed: tools/setup.sh batch")
    sys.exit(SKIPPED)

printed = subprocess.run(
    [sys.argv[1], "launch", "--launcher", "kubernetes", "-n", "3", "-s", "2", "--image", "registry/train:1", "--env",
     "LR=0.1", "--", "train", "--quick"], capture_output=True, text=True, check=True).stdout
items = json.loads(printed)["items"]
assert [item["kind"] for item in items] == ["Secret", "Service", "Job"]
for version in VERSIONS:
    for item in items:
        kubernetes_validate.validate(item, version, strict=True)
    items[2]["spec"]["completionsMode"] = "Indexed"  # the schema would tell
    try:
        kubernetes_validate.validate(items[2], version, strict=True)
        sys.exit("a field that does not exist was accepted")
    except kubernetes_validate.ValidationError:
        del items[2]["spec"]["completionsMode"]
print(f"{len(items)} objects are as the schemas of Kubernetes {' and '.join(VERSIONS)} say")
