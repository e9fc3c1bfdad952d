from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [("gateway", "0004_drop_retries")]

    operations = [migrations.DeleteModel("CapacityStep")]
